"""Users and roles of a private etcd. Passwords go through the API, not through etcdctl's command line."""

from __future__ import annotations

from slurm_elastic.rendezvous.records.etcd._stubs import load_rpc
from slurm_elastic.rendezvous.records.etcd.config import EtcdConfig
from slurm_elastic.rendezvous.records.etcd.errors import EtcdAuthenticationError, EtcdError, EtcdPermissionError
from slurm_elastic.rendezvous.records.etcd.failover_channel import Connection, Limits
from slurm_elastic.rendezvous.records.etcd.transactions import prefix_end

__all__ = ["enable_authentication"]


def enable_authentication(
    config: EtcdConfig, root_password: str, users: dict[str, tuple[str, str]], timeout: float = 10.0
) -> None:
    """Give a new etcd its root user, and users who may read and write one prefix each; then require both.

    Args:
        config: How to reach the etcd; without user and password, which it does not know yet.
        root_password: For the user root, whom etcd demands.
        users: For each further user the password and the prefix.
        timeout: Seconds for each call.

    Raises:
        EtcdError: etcd refused.
    """
    rpc = load_rpc()
    connection = Connection(config)

    def call(method: str, request: object) -> None:
        try:
            connection.call("Auth", method, request, Limits(timeout))
        except EtcdError as error:
            if not (error.retried and _is_done(method, error)):
                raise

    try:
        call("UserAdd", rpc.etcd.AuthUserAddRequest(name="root", password=root_password))
        call("RoleAdd", rpc.etcd.AuthRoleAddRequest(name="root"))
        call("UserGrantRole", rpc.etcd.AuthUserGrantRoleRequest(user="root", role="root"))
        for user, (password, prefix) in users.items():
            key = prefix.encode()
            permission = rpc.auth.Permission(permType=rpc.auth.Permission.READWRITE, key=key, range_end=prefix_end(key))
            call("UserAdd", rpc.etcd.AuthUserAddRequest(name=user, password=password))
            call("RoleAdd", rpc.etcd.AuthRoleAddRequest(name=user))
            call("RoleGrantPermission", rpc.etcd.AuthRoleGrantPermissionRequest(name=user, perm=permission))
            call("UserGrantRole", rpc.etcd.AuthUserGrantRoleRequest(user=user, role=user))
        call("AuthEnable", rpc.etcd.AuthEnableRequest())
    finally:
        connection.close()


def _is_done(method: str, error: EtcdError) -> bool:
    """Return whether a request sent twice has failed because it was carried out before (etcd 3.4, auth/store.go)."""
    if method in ("UserAdd", "RoleAdd"):
        return str(error).endswith("already exists")
    # From then on etcd wants to know who enables it.
    return method == "AuthEnable" and isinstance(error, EtcdAuthenticationError | EtcdPermissionError)
