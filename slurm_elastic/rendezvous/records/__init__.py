"""The run's durable records: in the run directory, or in etcd."""
