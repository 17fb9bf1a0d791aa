import os
from pathlib import Path

import torch

print(torch.get_num_threads(), torch.get_num_interop_threads(), os.environ.get("OMP_NUM_THREADS"))
torch.set_num_threads(2)
large = torch.ones(600, 600)
print((large @ large).sum().item(), len(list(Path("/proc/self/task").iterdir())) >= 2)
print(torch.distributed.is_available(), torch.cuda.is_initialized(), torch.is_grad_enabled(), torch.get_default_dtype())
print(Path("/proc/self/comm").read_text(), torch.distributed.get_debug_level())
