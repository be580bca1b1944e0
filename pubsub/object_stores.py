"""Stores that tables may lie in, S3 and HDFS, reached with the settings that Spark has for them.

Credentials are given once: as Hadoop's settings in `[spark.conf]`, or in the environment as for the stores' own tools.
They are translated for the three that read and write a table: Spark's file system, pyarrow's, and deltalake's.

S3:

    setting (fs.s3a.…, or fs.s3a.bucket.NAME.…)   environment
    access.key, secret.key, session.token         AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN
    endpoint, connection.ssl.enabled              AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL
    endpoint.region                               AWS_REGION, AWS_DEFAULT_REGION; without them Amazon is asked
    path.style.access

Without keys each of the three looks for them where Amazon's SDK does: in a profile, by a role's token (EKS), or in the
machine's role.

HDFS: all three take Hadoop's settings as they are, and those of the files in HADOOP_CONF_DIR.  HADOOP_USER_NAME, or
Kerberos' tickets, say who asks.
"""

from __future__ import annotations

import os
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pubsub.errors import FeatureNotSupported

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

# The scheme under which Hadoop knows S3 (settings.py makes it of s3://).
_S3_SCHEME: Final = "s3a://"
_HDFS_SCHEME: Final = "hdfs://"
_HADOOP: Final = "spark.hadoop."
_S3A: Final = "fs.s3a."
_REGION: Final = "us-east-1"
# Some seven seconds in all, for each of the three.
_ATTEMPTS: Final = 5
# Seconds.
_CONNECT: Final = 10.0
_REQUEST: Final = 60.0
_LOG_STORE: Final = "pubsub.ConditionalLogStore"
# Keys of the settings, and then the chain that Arrow has, too.  Hadoop's own list has neither profiles nor roles of a token.
_PROVIDERS: Final = (
    "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider",
    "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
)
# Hadoop's client waits 0.4 s before it asks a second time whether a file is complete, which a data node reports a
# millisecond after it has answered; and gives a name node that does not answer up at once.
_SESSION_OF_HDFS: Final = {
    "spark.hadoop.dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "2",
    "spark.hadoop.dfs.client.block.write.locateFollowingBlock.retries": "12",
    "spark.hadoop.dfs.client.retry.policy.enabled": "true",
    "spark.hadoop.dfs.client.retry.policy.spec": "1000,6",
}

_lock = threading.Lock()
_conf: dict[str, str] = {}


def configure(conf: Mapping[str, str]) -> None:
    """Use these settings of Spark's session in this process, for all stores."""
    with _lock:
        if dict(conf) != _conf:
            _conf.clear()
            _conf.update(conf)
            _s3.cache_clear()
            _region_at_amazon.cache_clear()
            _hdfs.cache_clear()


def configured() -> dict[str, str]:
    """Return the settings in use, for another process."""
    return {_HADOOP + name: value for name, value in hadoop_settings().items()}


def is_store(path: str) -> bool:
    """Return whether the path lies in a store that this module reaches."""
    return path.startswith((_S3_SCHEME, _HDFS_SCHEME))


def is_s3(path: str) -> bool:
    """Return whether the path lies in S3, for which Spark needs jars of its own."""
    return path.startswith(_S3_SCHEME)


def has_directories(path: str) -> bool:
    """Return whether the store that the path lies in keeps a directory that holds nothing."""
    return path.startswith(_HDFS_SCHEME)


def session_conf(uri: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that Spark's session needs for tables under `uri`, besides `conf`; {} for local ones."""
    if not is_store(uri):
        return {}
    found = _session_conf_of_s3(uri, conf) if is_s3(uri) else _SESSION_OF_HDFS
    return {name: value for name, value in found.items() if name not in conf}


def _session_conf_of_s3(uri: str, conf: Mapping[str, str]) -> dict[str, str]:
    found = {
        # Hadoop's default stream needs Amazon's native library for what it does better.
        f"{_HADOOP}{_S3A}input.stream.type": "classic",
        # A parent that is a file does not occur, and looking for one costs requests with each file.
        f"{_HADOOP}{_S3A}create.performance": "true",
        f"{_HADOOP}{_S3A}attempts.maximum": "3",
        f"{_HADOOP}{_S3A}retry.limit": "3",
        "spark.delta.logStore.s3a.impl": _LOG_STORE,
    }
    if f"{_S3A}aws.credentials.provider" not in hadoop_settings(conf):
        found[f"{_HADOOP}{_S3A}aws.credentials.provider"] = ",".join(_PROVIDERS)
    s3 = _S3.of(_authority(uri), conf)
    if s3.endpoint is not None:
        found[f"{_HADOOP}{_S3A}endpoint"] = s3.endpoint
        found[f"{_HADOOP}{_S3A}path.style.access"] = "true"
    if s3.region is not None:
        found[f"{_HADOOP}{_S3A}endpoint.region"] = s3.region
    return found


@dataclass(frozen=True, slots=True)
class _S3:
    """What one bucket is reached with; None: as Amazon's SDK finds it."""

    access_key: str | None
    secret_key: str | None
    session_token: str | None
    endpoint: str | None
    region: str | None
    anonymous: bool

    @classmethod
    def of(cls, bucket: str, conf: Mapping[str, str]) -> _S3:
        def setting(name: str) -> str | None:
            for prefix in (f"{_HADOOP}{_S3A}bucket.{bucket}.", f"{_HADOOP}{_S3A}"):
                if (value := conf.get(prefix + name)) is not None:
                    return value.strip() or None
            return None

        env = os.environ
        endpoint = setting("endpoint") or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
        if endpoint is not None and "://" not in endpoint:
            secure = (setting("connection.ssl.enabled") or "true").lower() == "true"
            endpoint = f"{'https' if secure else 'http'}://{endpoint}"
        provider = setting("aws.credentials.provider") or ""
        return cls(
            setting("access.key"),
            setting("secret.key"),
            setting("session.token"),
            endpoint,
            setting("endpoint.region") or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION"),
            "AnonymousAWSCredentialsProvider" in provider,
        )


def _authority(uri: str) -> str:
    """Return the bucket, or the name node."""
    return uri.partition("://")[2].partition("/")[0]


def file_system(uri: str) -> FileSystem:
    """Return pyarrow's file system of the store that `uri` lies in.  Raises FeatureNotSupported for an unknown one."""
    if not is_store(uri):
        raise FeatureNotSupported(f'files at "{uri}" are not reached without Spark')
    return (_s3 if is_s3(uri) else _hdfs)(_authority(uri))


@cache
def _hdfs(authority: str) -> FileSystem:
    from pyarrow import fs

    from pubsub.hdfs import Hdfs

    return fs.PyFileSystem(Hdfs(authority, hadoop_settings()))


def hadoop_settings(conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return Hadoop's settings: those of the files in HADOOP_CONF_DIR, and before them Spark's (None: those in use)."""
    found: dict[str, str] = {}
    home = os.environ.get("HADOOP_HOME")
    directory = os.environ.get("HADOOP_CONF_DIR") or (f"{home}/etc/hadoop" if home else None)
    for name in ("core-site.xml", "hdfs-site.xml") if directory else ():
        path = Path(directory or "", name)
        if path.is_file():
            for one in ElementTree.parse(path).getroot().iter("property"):  # noqa: S314 (the administrator's own)
                found[(one.findtext("name") or "").strip()] = (one.findtext("value") or "").strip()
    if conf is None:
        with _lock:
            conf = dict(_conf)
    return found | {name.removeprefix(_HADOOP): value for name, value in conf.items() if name.startswith(_HADOOP)}


def _region(bucket: str, s3: _S3) -> str:
    """Return the region that requests are signed for.  Raises OSError if Amazon is asked for it and does not tell.

    Hadoop's file system finds it by itself.  With an endpoint the store is not Amazon's, and nobody may be asked.
    """
    return s3.region or (_REGION if s3.endpoint else _region_at_amazon(bucket))


@cache
def _region_at_amazon(bucket: str) -> str:
    from pyarrow import fs

    return str(fs.resolve_s3_region(bucket))


@cache
def _s3(bucket: str) -> FileSystem:
    from pyarrow import fs

    with _lock:
        s3 = _S3.of(bucket, _conf)
    scheme, _, endpoint = (s3.endpoint or "https://").partition("://")
    return fs.S3FileSystem(
        access_key=s3.access_key,
        secret_key=s3.secret_key,
        session_token=s3.session_token,
        anonymous=s3.anonymous,
        region=_region(bucket, s3),
        endpoint_override=endpoint.rstrip("/") or None,
        scheme=scheme,
        connect_timeout=_CONNECT,
        request_timeout=_REQUEST,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        background_writes=True,
        allow_delayed_open=True,
    )


def endpoint(uri: str) -> str | None:
    """Return the URL of the store on S3 that `uri` lies in; None: Amazon's.  Asks nobody."""
    with _lock:
        return _S3.of(_authority(uri), _conf).endpoint


def options(uri: str) -> dict[str, str] | None:
    """Return deltalake's storage_options for a table at `uri`; None for a local one."""
    if not is_store(uri):
        return None
    if not is_s3(uri):
        return {name: value for name, value in hadoop_settings().items() if not name.startswith(_S3A)}
    bucket = _authority(uri)
    with _lock:
        s3 = _S3.of(bucket, _conf)
    region = None
    with suppress(OSError):  # deltalake looks for it in its own way then
        region = _region(bucket, s3)
    found = {
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
        "AWS_SESSION_TOKEN": s3.session_token,
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_REGION": region,
        "AWS_ALLOW_HTTP": "true" if s3.endpoint and s3.endpoint.startswith("http://") else None,
        "AWS_SKIP_SIGNATURE": "true" if s3.anonymous else None,
        "connect_timeout": f"{_CONNECT:g}s",
        "timeout": f"{_REQUEST:g}s",
        "max_retries": str(_ATTEMPTS),
        "retry_timeout": f"{_REQUEST:g}s",
    }
    return {name: value for name, value in found.items() if value is not None}
