"""What libraries raise, as errors of ours: what failed, what the store said, what to do, and whether to try
again.

Pure apart from reading exceptions. Messages name the URI and the endpoint, never a credential: of a server's
answer only the code and the status are quoted, since its text may hold an access key or a signed string.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bagelplane.errors import BagelplaneError, ObjectExistsError, StorageError, TransientStorageError
from bagelplane.storage.uris import Location, show


class ObjectMissingError(StorageError):
    """The object, or everything below a prefix, is not there; the bucket is."""

    reaction = "Correct the key or prefix that the message names, or write the object first."


class ObjectTooLargeError(StorageError):
    """The object is larger than what it should be can be. It was not read."""

    reaction = "Look at what lies there: the message names it."

    @classmethod
    def of(cls, location: Location, size: str, limit_bytes: int) -> ObjectTooLargeError:
        return cls(
            f"cannot read {show(location.uri)}: it is too large",
            got=size,
            expected=f"at most {limit_bytes} bytes",
            fix="restore the object, or remove what lies in its place",
        )


class UnusableNameError(StorageError):
    """The address can be the name of nothing: it is too long, goes in a circle, holds signs that no path has."""

    reaction = "Correct the address that the message names."


class Retry(Enum):
    """How a fault is met."""

    NO = "no"
    BACKOFF = "backoff"  # the store's trouble: it passes
    BRIEF = "brief"  # no server there: a restart passes in a second, a wrong address never
    RECONNECT = "reconnect"  # credentials that may have been renewed meanwhile


@dataclass(frozen=True, slots=True)
class Fault:
    error: BagelplaneError
    retry: Retry = Retry.NO
    source: str = "store"
    """Who failed: store, connection or file_system."""

    @property
    def cause(self) -> str:
        """Of a retry, in a word for counting: credentials, unreachable, or the source."""
        return {Retry.RECONNECT: "credentials", Retry.BRIEF: "unreachable"}.get(self.retry, self.source)


@dataclass(frozen=True, slots=True)
class Attempted:
    """What was being done when it failed. `verb` completes "cannot ...": "read", "list", "write"."""

    verb: str
    location: Location
    endpoint: str = ""

    @property
    def text(self) -> str:
        at = "" if self.location.is_local or not self.endpoint else f" at {self.endpoint}"
        return f"cannot {self.verb} {show(self.location.uri)}{at}"


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The error part of a server's answer."""

    code: str
    status: int
    bucket_region: str = ""

    @property
    def text(self) -> str:
        if not self.status or self.code == str(self.status):
            return f"HTTP {self.code}"
        return f"{self.code} (HTTP {self.status})"


_CREDENTIALS_FIX = (
    "correct the access key and secret (the Secret or folder of credentials, profile or environment)"
)
_EXPIRED_FIX = "renew the credentials; in a cluster update the Secret"
_PACKAGE_FIX = "install gcsfs for gs://, adlfs for az://"


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a code or an exception's name means."""

    names: frozenset[str]
    reason: str
    fix: str
    kind: type[StorageError] = StorageError
    retry: Retry = Retry.NO


def _rule(
    names: str, reason: str, fix: str, kind: type[StorageError] = StorageError, retry: Retry = Retry.NO
) -> _Rule:
    return _Rule(frozenset(names.split()), reason, fix, kind, retry)


_WRONG_REGION = _rule(
    "PermanentRedirect Redirect AuthorizationHeaderMalformed IllegalLocationConstraintException 301 307",
    "the bucket is in another region",
    "set the region of the bucket, or correct the endpoint",
)
_STORE_IN_TROUBLE = _rule(
    "SlowDown ServiceUnavailable InternalError RequestTimeout Throttling ThrottlingException TooManyRequests "
    "RequestLimitExceeded OperationAborted ConditionalRequestConflict IncompleteBody TemporaryRedirect "
    "BadDigest XAmzContentSHA256Mismatch 409 429",
    "the store is in trouble",
    "try again later",
    TransientStorageError,
    Retry.BACKOFF,
)
_MISSING = _rule(
    "NoSuchKey NoSuchVersion NotFound 404",
    "there is no such object",
    "correct the key, or write it first",
    ObjectMissingError,
)
_DENIED = _rule(
    "AccessDenied AllAccessDisabled AccountProblem Forbidden InvalidObjectState 403",
    "access is denied",
    "give these credentials the right to it, or use others",
    retry=Retry.RECONNECT,
)
_REFUSED = _rule("", "the store refused the request", "look the code up in the store's manual")
# By the code in a server's answer. The codes are S3's; most servers share them.
_ANSWERS = (
    _rule(
        "NoSuchBucket", "there is no such bucket", "create the bucket, or correct its name or the endpoint"
    ),
    _rule("PreconditionFailed 412", "it is there already", "use another key", ObjectExistsError),
    _rule(
        "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken RequestExpired",
        "the credentials have expired",
        _EXPIRED_FIX,
        retry=Retry.RECONNECT,
    ),
    _rule(
        "InvalidAccessKeyId SignatureDoesNotMatch UnrecognizedClientException InvalidClientTokenId "
        "XAdminUserNotFound",
        "the credentials are wrong",
        _CREDENTIALS_FIX,
        retry=Retry.RECONNECT,
    ),
    _rule("RequestTimeTooSkewed", "the clock of this machine is wrong", "set the clock"),
    _WRONG_REGION,
    _STORE_IN_TROUBLE,
    _MISSING,
    _DENIED,
    _rule("InvalidBucketName", "the bucket's name is not valid", "correct the address"),
    _rule(
        "MissingSecurityHeader UnsupportedAlgorithm",
        "the store takes signed requests only",
        "give credentials",
    ),
    _rule("NotImplemented 501", "the store cannot do this", "use another store"),
)
# By the name of an exception or of one of its bases: botocore and aiohttp are not imported for local data.
_EXCEPTIONS = (
    _rule("ProfileNotFound", "there is no such AWS profile", "correct the profile's name"),
    _rule("InvalidRegionError", "the region is no region name", "correct the region"),
    _rule("NoRegionError", "no region is set", "set the region"),
    _rule("ParamValidationError", "bucket or key is not valid", "correct the address"),
    _rule("SSLError", "no secure connection is made", "correct the endpoint's scheme, or its certificates"),
    _rule("ProxyConnectionError", "the proxy does not answer", "correct HTTPS_PROXY"),
    _rule("ImportError", "the package for this scheme is not installed", _PACKAGE_FIX),
    _rule(
        "NoCredentialsError PartialCredentialsError CredentialRetrievalError TokenRetrievalError "
        "UnauthorizedSSOTokenError SSOTokenLoadError NoAuthTokenError",
        "no credentials were found",
        "set credentialsDir, AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    _rule(
        "EndpointConnectionError ClientConnectorError ConnectionRefusedError",
        "no server answers there",
        "start the server, or correct the endpoint",
        retry=Retry.BRIEF,
    ),
    _rule(
        "HTTPClientError ResponseStreamingError IncompleteReadError ClientPayloadError ClientConnectionError "
        "ClientOSError FlexibleChecksumError ConnectionError TimeoutError",
        "the connection was lost or too slow",
        "look at the store and the network",
        TransientStorageError,
        Retry.BACKOFF,
    ),
    _rule("FileNotFoundError", _MISSING.reason, _MISSING.fix, ObjectMissingError),
    _rule("FileExistsError", "it is there already", "use another key", ObjectExistsError),
    _rule("PermissionError", _DENIED.reason, _DENIED.fix, retry=Retry.RECONNECT),
)


def changed(attempted: Attempted, version: str) -> StorageError:
    """An object is not any more what was seen first."""
    return StorageError(
        f"{attempted.text}: it was changed since it was first seen",
        expected=f"version {version}",
        fix="write new data under new keys, and start again",
    )


def answer_of(error: BaseException) -> ServerAnswer | None:
    """The server's own error, if one is among the causes of this exception."""
    for cause in _causes(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            metadata = response.get("ResponseMetadata") or {}
            headers = metadata.get("HTTPHeaders") or {}
            region = str(headers.get("x-amz-bucket-region") or response["Error"].get("Region") or "")
            return ServerAnswer(
                show(str(response["Error"].get("Code") or "")),
                int(metadata.get("HTTPStatusCode") or 0),
                show(region),
            )
    return None


def is_bodyless(error: BaseException) -> bool:
    """Whether the answer had no body, as those to HEAD: then its code is just the status, and says little."""
    answer = answer_of(error)
    return answer is not None and answer.code in {"", "400", "403", "404", "301", "307", "Unknown"}


def classify(error: BaseException, attempted: Attempted, *, region: str = "") -> Fault:
    """What this exception of a library means. Never raises."""
    if isinstance(error, BagelplaneError):
        is_transient = isinstance(error, TransientStorageError)
        return Fault(error, Retry.BACKOFF if is_transient else Retry.NO)
    answer = answer_of(error)
    if answer is not None:
        return _classify_answer(answer, attempted, region)
    if attempted.location.is_local and isinstance(error, (OSError, ValueError)):
        return _classify_local(error, attempted)
    return _classify_client_side(error, attempted)


def _classify_answer(answer: ServerAnswer, attempted: Attempted, region: str) -> Fault:
    by_code = (rule for rule in _ANSWERS if answer.code in rule.names)
    rule = next(by_code, None) or _rule_of_status(answer.status)
    reason, fix, expected = rule.reason, rule.fix, ""
    if rule is _WRONG_REGION:
        reason += f" than {show(region)}" if region else ""
        if answer.bucket_region:
            expected = f"region {answer.bucket_region}"
            fix = f"set the region to {answer.bucket_region}, or correct the endpoint"
    error = rule.kind(f"{attempted.text}: {reason}", got=answer.text, expected=expected, fix=fix)
    return Fault(error, rule.retry)


def _rule_of_status(status: int) -> _Rule:
    if status >= 500:
        return _STORE_IN_TROUBLE
    return {403: _DENIED, 301: _WRONG_REGION}.get(status, _REFUSED)


_LOCAL = {
    errno.ENOENT: ("there is no such file or folder", "correct the path"),
    errno.EACCES: ("permission is denied", "give this user the right to it"),
    errno.EPERM: ("the operation is not permitted", "give this user the right to it"),
    errno.EISDIR: ("it is a folder", "name a file"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", "correct the path"),
    errno.ENOSPC: ("no space is left on the device", "make room, or use another folder"),
    errno.EDQUOT: ("the quota is used up", "make room, or use another folder"),
    errno.EROFS: ("the file system is read-only", "use another folder, or mount it writable"),
    errno.ENAMETOOLONG: ("the name is too long", "use a shorter one"),
    errno.ELOOP: ("symbolic links go in a circle", "correct the links"),
    errno.EMFILE: ("too many files are open", "raise the limit (ulimit -n)"),
}
_LOCAL_TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EREMOTEIO}


def _classify_local(error: OSError | ValueError, attempted: Attempted) -> Fault:
    number = error.errno if isinstance(error, OSError) else None
    got = errno.errorcode.get(number, str(number)) if number else type(error).__name__
    if number in _LOCAL_TRANSIENT:
        text = f"{attempted.text}: the file system is in trouble"
        return Fault(
            TransientStorageError(text, got=got, fix="look at the disk or the network mount"),
            Retry.BACKOFF,
            "file_system",
        )
    if number == errno.EEXIST:
        return Fault(
            ObjectExistsError(f"{attempted.text}: it is there already", got=got, fix="use another name")
        )
    reason, fix = _LOCAL.get(number or 0, ("the path cannot be used", "correct the path"))
    kind: type[StorageError] = StorageError
    if number in {errno.ENOENT, errno.EISDIR, errno.ENOTDIR}:
        # A store has no folders: there, a folder's name is the name of nothing.
        kind = ObjectMissingError
    elif number in {errno.ENAMETOOLONG, errno.ELOOP} or isinstance(error, ValueError):
        # The system refuses zero bytes, and what cannot be encoded, with a ValueError.
        kind = UnusableNameError
    return Fault(kind(f"{attempted.text}: {reason}", got=got, fix=fix))


def _classify_client_side(error: BaseException, attempted: Attempted) -> Fault:
    names = {base.__name__ for cause in _causes(error) for base in type(cause).__mro__}
    rule = next((rule for rule in _EXCEPTIONS if rule.names & names), None)
    if rule is None and "nvalid endpoint" in str(error):
        rule = _rule("", "the endpoint is no URL", "write for example http://127.0.0.1:9000")
    if rule is None:
        rule = _rule("", "it failed", "look at the log at level DEBUG")
    what = f"{attempted.text}: {rule.reason}"
    source = "file_system" if attempted.location.is_local else "connection"
    return Fault(rule.kind(what, got=type(error).__name__, fix=rule.fix), rule.retry, source)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
