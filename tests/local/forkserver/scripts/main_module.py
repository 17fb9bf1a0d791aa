"""A documented script."""

import inspect
import json
import sys
import traceback

main = sys.modules["__main__"]
print(json.dumps(sorted(globals())))
print(__name__, __file__, __spec__, __package__, __doc__, __builtins__.__name__, type(__loader__).__name__)
print(main.__dict__ is globals(), inspect.getmodule(inspect.currentframe()) is main)
print(len(inspect.stack()), sys._getframe().f_back, len(traceback.extract_stack()), inspect.stack()[-1].filename)
traceback.print_stack()
print([name for name in sys.modules if "slurm_elastic.agent" in name or "sitecustomize" in name])
