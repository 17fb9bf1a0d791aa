import faulthandler
import os
import signal
from pathlib import Path

print([(int(number), str(signal.getsignal(number))) for number in sorted(signal.valid_signals())])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending(), signal.set_wakeup_fd(-1))
for line in Path("/proc/self/status").read_text().splitlines():
    if line.startswith(("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")):
        # Without the two signals that glibc keeps for itself (nptl(7)); it catches them once a thread was started.
        print(line[:6], hex(int(line[7:], 16) & ~(3 << 31)))
print(os.getpid() == os.getpgrp() == os.getsid(0), faulthandler.is_enabled())
