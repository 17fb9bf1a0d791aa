"""etcd v3: a store outside of the run, which outlives every node.

EtcdStore and the backend for torch's own handler are in ``store``, which imports torch.
"""
