from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record


class Handler(ErrorHandler):
    # Called since torch 2.15.
    def record_success(self):
        print("succeeded:", self._fn_name)


def main():
    print("recorded")


record(main, Handler())()
