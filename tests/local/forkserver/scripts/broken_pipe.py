import os

reading, writing = os.pipe()
os.close(reading)
os.write(writing, b"x")
