"""An authenticated session between an agent and the leader, without any I/O.

Bytes go in, messages and bytes come out. Both ends prove that they hold the run's secret before they read anything
else, each with the other's fresh random number, so nothing recorded earlier can be played back. Every later frame
carries a code over its direction, its number and its content: forged, changed, repeated or reordered frames end the
session. Who may send which frame, and what each proves, is in docs/architecture.md.

The agent's greeting, and the leader's answer to one of another protocol, keep their fields in every protocol, so that
agents of different versions can tell a person what to fix.

Frame: 4 bytes length, big endian, then the content; after the handshake the content starts with a 32-byte code.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import re
import secrets
import struct
from collections.abc import Callable
from typing import Any

from slurm_elastic import typed_json
from slurm_elastic._version import __version__

PROTOCOL = 8
"""Changed whenever a message changes; agents of one run must have the same."""

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_CODE_SIZE = hashlib.sha256().digest_size
_MAX_HANDSHAKE = 4096
_MAX_FRAME = 1 << 20
_MAGIC = "slurm_elastic"
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}")
_WRONG_PROOF = "a wrong proof: another run, or another secret"


class SessionError(Exception):
    """The other end sent something that is not a valid frame of this session; close the connection.

    Attributes:
        answer: Bytes to send before that, so that the other end learns why.
    """

    def __init__(self, message: str = "", answer: bytes = b"") -> None:
        super().__init__(message)
        self.answer = answer


class ForeignError(SessionError):
    """The other end is not part of this run: another program, another run, or another incarnation."""


class TwinError(ForeignError):
    """The other end claims to lead this run, and has another secret, so it uses another run directory.

    Any process can claim that, so an agent acts on it only where it finds no other leader.
    """


class RefusedError(SessionError):
    """This listening end has refused a member of the run; `answer` names the reason."""


class ClosedError(ForeignError):
    """The other end is an agent of this run, as it has proved, and does not lead."""


class BusyError(SessionError):
    """The other end leads this run, as it has proved, and has no room for one more connection now.

    Attributes:
        seconds: How long to wait before the next attempt.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"a leader that has no room now; coming again in {seconds:.1f} s")
        self.seconds = seconds


class VersionError(SessionError):
    """The other end is slurm_elastic of a version with another protocol."""


class Role(enum.Enum):
    """The end of a session: the agent connects, the leader listens."""

    AGENT = "agent"
    LEADER = "leader"


class Session:
    """One end of one session.

    Args:
        run: Run id and incarnation; agents of another one are foreign.
        agent: The agent's identity; the leader's end takes it from the greeting.
        epoch: The leader's epoch; the agent's end takes it from the answer. The listening end of an agent that does not
            lead has none, 0, and tells strangers nothing.
        port: The port that the listening end listens on.
        refuses: On the listening end: returns, for the agent and the random number of a valid greeting, None to admit
            it, the seconds after which it is to connect again, or 0 if no leader runs here. May raise SessionError.

    Attributes:
        admitted: On the listening end, True once the greeting has proved membership of the run.
        established: True once both ends have proved their identity.
    """

    def __init__(
        self,
        role: Role,
        secret: bytes,
        run: str,
        *,
        agent: str = "",
        epoch: int = 0,
        port: int = 0,
        refuses: Callable[[str, str], float | None] = lambda agent, nonce: None,
    ) -> None:
        self.role = role
        self.agent = agent
        self.epoch = epoch
        self.port = port
        self.admitted = self.established = False
        self._refuses = refuses
        self._secret = secret
        self._run = run
        self._nonce = secrets.token_hex(16)
        self._pending = bytearray()
        self._keys: dict[Role, bytes] = {}
        self._sent = 0
        self._received = 0
        self._challenge = ""

    def start(self) -> bytes:
        """Return the bytes to send first: the agent's greeting; none on the leader's end."""
        if self.role is Role.LEADER:
            return b""
        return self._greeting(agent=self.agent, tag=self._proof("hello", self._nonce, self.agent))

    def receive(self, data: bytes) -> tuple[list[dict[str, Any]], bytes]:
        """Read bytes of the other end.

        Returns:
            The messages that are complete now, and bytes to send back (handshake only).

        Raises:
            SessionError: The bytes are no valid frame, or the other end is refused; the subclass says why.
        """
        self._pending += data
        messages: list[dict[str, Any]] = []
        answer = b""
        while len(self._pending) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pending)
            if size > (_MAX_FRAME if self.established else _MAX_HANDSHAKE):
                raise (SessionError if self.established else ForeignError)(f"a frame of {size} bytes")
            if len(self._pending) < _LENGTH.size + size:
                break
            content = bytes(self._pending[_LENGTH.size : _LENGTH.size + size])
            del self._pending[: _LENGTH.size + size]
            if self.established:
                messages.append(self._open(content))
            else:
                answer += self._shake_hands(content)
        return messages, answer

    def seal(self, content: bytes) -> bytes:
        """Return the frame of one message, given as JSON, with its code."""
        code = self._code(self.role, self._sent, content)
        self._sent += 1
        return _frame(code + content)

    def _open(self, content: bytes) -> dict[str, Any]:
        code, content = content[:_CODE_SIZE], content[_CODE_SIZE:]
        other = Role.LEADER if self.role is Role.AGENT else Role.AGENT
        if not hmac.compare_digest(code, self._code(other, self._received, content)):
            raise SessionError("a frame with a wrong code")
        self._received += 1
        return _object(content)

    def _code(self, sender: Role, number: int, content: bytes) -> bytes:
        # Keyed BLAKE2b (RFC 7693) takes a quarter of the time of HMAC-SHA256 for frames as short as most of these are.
        return hashlib.blake2b(_NUMBER.pack(number) + content, key=self._keys[sender], digest_size=_CODE_SIZE).digest()

    def _shake_hands(self, content: bytes) -> bytes:
        try:
            message = _object(content)
        except SessionError as error:
            raise ForeignError(str(error)) from None
        if self.role is Role.AGENT:
            return self._welcomed(message)
        return self._hello(message) if not self._challenge else self._authenticated(message)

    def _hello(self, message: dict[str, Any]) -> bytes:
        self._challenge, protocol, version = _greeting(message)
        if protocol != PROTOCOL:
            proof = self._proof("version", self._challenge, str(PROTOCOL), __version__)
            raise VersionError(_mismatch(protocol, version), self._greeting(proof=proof))
        epoch = self.epoch
        proof = self._proof("leader", self._challenge, self._nonce, str(epoch), str(self.port))
        welcome = self._greeting(epoch=epoch, run=self._run_name(), proof=proof)
        agent = message.get("agent")
        if not isinstance(agent, str) or not _proves(message.get("tag"), self._proof("hello", self._challenge, agent)):
            raise ForeignError(_WRONG_PROOF, welcome if epoch else b"")
        seconds = self._refuses(agent, self._challenge)
        if seconds is not None:
            proof = self._proof("refused", self._challenge, self._nonce, str(seconds), str(self.port))
            raise RefusedError("refused", self._greeting(refused=seconds, proof=proof))
        self.agent, self.admitted = agent, True
        return welcome

    def _greeting(self, **fields: object) -> bytes:
        opening = {"hello": _MAGIC, "protocol": PROTOCOL, "version": __version__, "nonce": self._nonce}
        return _frame(_json({**opening, **fields}))

    def _welcomed(self, message: dict[str, Any]) -> bytes:
        nonce, protocol, version = _greeting(message)
        if protocol != PROTOCOL:
            # Only from this very run: another one that has the port must not end this agent.
            self._check(message, self._proof("version", self._nonce, str(protocol), version))
            raise VersionError(_mismatch(protocol, version))
        refused = message.get("refused")
        if isinstance(refused, float):
            self._check(message, self._proof("refused", self._nonce, nonce, str(refused), str(self.port)))
            raise BusyError(refused) if refused else ClosedError("an agent that does not lead")
        epoch = message.get("epoch")
        if not isinstance(epoch, int):
            raise ForeignError("a greeting without epoch")
        try:
            self._check(message, self._proof("leader", self._nonce, nonce, str(epoch), str(self.port)))
        except ForeignError as error:
            if message.get("run") == self._run_name():
                raise TwinError("a leader of this run by another run directory") from error
            raise
        self.epoch = epoch
        answer = {"agent": self.agent, "proof": self._proof("agent", self._nonce, nonce, self.agent)}
        self._establish(self._nonce, nonce)
        return _frame(_json(answer))

    def _authenticated(self, message: dict[str, Any]) -> bytes:
        agent = message.get("agent")
        if not isinstance(agent, str) or not agent:
            raise ForeignError("a stranger that names no agent")
        if agent != self.agent:
            raise ForeignError("another agent than the one that was greeted")
        self._check(message, self._proof("agent", self._challenge, self._nonce, agent))
        self._establish(self._challenge, self._nonce)
        return b""

    def _establish(self, agent_nonce: str, leader_nonce: str) -> None:
        for role in Role:
            self._keys[role] = self._digest("session", role.value, agent_nonce, leader_nonce)
        self.established = True

    def _check(self, message: dict[str, Any], expected: str) -> None:
        if not _proves(message.get("proof"), expected):
            raise ForeignError(_WRONG_PROOF)

    def _run_name(self) -> str:
        """Return a digest of run id and incarnation, for comparison only, as it goes to strangers."""
        return hashlib.sha256(_json(["run", self._run])).hexdigest()

    def _proof(self, *words: str) -> str:
        return self._digest(*words).hex()

    def _digest(self, *words: str) -> bytes:
        return hmac.digest(self._secret, _json([self._run, *words]), "sha256")


def _greeting(message: dict[str, Any]) -> tuple[str, int, str]:
    """Return nonce, protocol and version of the other end. Nothing is proved yet, but the version is safe to log."""
    if message.get("hello") != _MAGIC:
        raise ForeignError("something that is not slurm_elastic")
    nonce, protocol, version = (message.get(key) for key in ("nonce", "protocol", "version"))
    if not isinstance(nonce, str) or len(nonce) != 32:
        raise ForeignError("a greeting without nonce")
    if not isinstance(protocol, int) or not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise ForeignError("a greeting without version")
    return nonce, protocol, version


def _proves(proof: object, expected: str) -> bool:
    return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, expected)


def _mismatch(protocol: int, version: str) -> str:
    return (
        f"slurm_elastic {version} there speaks protocol {protocol}, {__version__} here speaks {PROTOCOL}; "
        "install the same version on all nodes"
    )


def _frame(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = typed_json.loads(content)
    except typed_json.JSONError:
        raise SessionError("content that is no JSON") from None
    if not isinstance(value, dict):
        raise SessionError("content that is no JSON object")
    return value
