import multiprocessing
import pickle
import sys


class Point:
    def __init__(self, x):
        self.x = x


def double(point):
    return Point(2 * point.x)


if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Point(3))).x, Point.__module__, pickle.dumps(Point)[:40])
    print(multiprocessing.parent_process(), multiprocessing.current_process().name, multiprocessing.active_children())
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            print(method, [point.x for point in pool.map(double, [Point(1), Point(2)])])
    print(sys.modules["__main__"].Point is Point)
