"""Tell whether tables can be written in a warehouse, before anything is made that would wait for it.  Blocks."""

from __future__ import annotations

import errno
import os
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from pubsub import fsync
from pubsub.errors import PubsubError
from pubsub.object_stores import is_s3, is_store

# What the text of an error has, the SQLSTATE, and the hint.
_OF_S3: Final = (
    ("NO_SUCH_BUCKET", "3F000", 'Create the bucket, or correct the setting "warehouse".'),
    ("STATUS 301", "22023", "The bucket is in another region than requests are sent to."),
    ("ACCESS_DENIED", "42501", "The key's owner must be allowed to list, read, write and delete objects there."),
    ("INVALID_ACCESS_KEY", "28000", "The access key is unknown to the store."),
    ("SIGNATURE", "28P01", "The secret key does not fit the access key."),
    ("CREDENTIALS", "28000", "No credentials were found."),
    ("NETWORK_CONNECTION", "08001", "The store cannot be reached."),
    ("NOT FOUND", "3F000", 'Create the bucket, or correct the setting "warehouse".'),
)
_SETTINGS_OF_S3: Final = (
    'Credentials are given in [spark.conf], as "spark.hadoop.fs.s3a.access.key", "….secret.key", "….endpoint" and '
    '"….endpoint.region", or in the environment (AWS_ACCESS_KEY_ID …, AWS_REGION).'
)
_UNREACHED: Final = "The name node cannot be reached."
_OF_HDFS: Final = (
    ("ACCESSCONTROL", "42501", "The user must be allowed to make directories and files there."),
    ("SAFE MODE", "57P03", "The name node takes no files yet."),
    ("COULD ONLY BE WRITTEN TO", "08001", "The name node has no data node for a file."),
    ("QUOTA", "53400", "The directory has as many files or bytes as it may have."),
    ("SASL", "28000", "The name node asks for Kerberos: give the daemon a ticket (kinit)."),
    ("GSSAPI", "28000", "The name node asks for Kerberos: give the daemon a ticket (kinit)."),
    ("CONNECTION", "08001", _UNREACHED),
    ("LOOKUP ADDRESS", "08001", _UNREACHED),
    ("NO ANSWER", "08001", _UNREACHED),
    ("NO NAMENODE HOSTS", "08001", "The name has no port, and no settings say that it is a name service."),
    ("NO FS.DEFAULTFS", "08001", 'Name the name node, or set "fs.defaultFS".'),
)
_SETTINGS_OF_HDFS: Final = (
    'Settings come from HADOOP_CONF_DIR\'s files and [spark.conf] ("spark.hadoop.dfs…"), the user from Kerberos or '
    "HADOOP_USER_NAME."
)


def require_writable(warehouse: str) -> str | None:
    """Do under `warehouse` what tables need, and undo it.  Raises PubsubError.  One that only Spark reaches is not tried.

    Returns why it was not tried whether a store refuses to replace an object; None if it does, or is known to.
    """
    if is_store(warehouse):
        return _require_writable_store(warehouse)
    if "://" not in warehouse or warehouse.startswith("file://"):
        _require_writable_directory(Path(warehouse.removeprefix("file://")))
    return None


def _require_writable_directory(directory: Path) -> None:
    try:
        try_directory(directory)
    except OSError as error:
        raise PubsubError(
            f'warehouse "{directory}" cannot be used: {error.strerror}',
            sqlstate="42501" if isinstance(error, PermissionError) else "58030",
            detail=failed_step(error),
            hint='Name a directory in the setting "warehouse" that this user may write, on a disk with hard links.',
        ) from error


def try_directory(directory: Path) -> None:
    """Do there what a commit does: write, fsync, link without replacing, rename, fsync of the names.

    If the directory does not exist yet, it is tried in the nearest one that does.  Raises OSError, with a note that names
    the step.
    """
    step = "making a directory"
    try:
        with tempfile.TemporaryDirectory(prefix=".pubsub-check-", dir=existing(directory)) as made:
            first, second = Path(made) / "first", Path(made) / "second"
            step = "writing a file"
            with first.open("xb") as file:
                file.write(b"probe")
                file.flush()
                step = "fsync of a file"
                os.fsync(file.fileno())
            # How Delta's log for local directories makes a version that must not exist yet (LinkLogStore.java).
            step = "making a hard link"
            os.link(first, second)
            step = "refusing to link over a file"
            try:
                os.link(first, second)
            except FileExistsError:
                pass
            else:
                raise OSError(errno.ENOTSUP, "a file was replaced that was there")
            step = "renaming a file"
            first.replace(second)
            step = "fsync of a directory"
            fsync.sync_directory(Path(made))
    except OSError as error:
        error.add_note(step)
        raise


def existing(directory: Path) -> Path:
    """Return the directory, or else the nearest one above it that exists."""
    for one in (directory, *directory.parents):
        with suppress(OSError):
            if one.stat():
                return one
    return Path("/")


def failed_step(error: OSError) -> str:
    """Tell at which of its steps `try_directory` failed."""
    return f"It failed at {error.__notes__[-1]}."


def _require_writable_store(warehouse: str) -> str | None:
    """Put an object under `warehouse`, read it, list it, do not replace it, and delete it."""
    # Imported here because Arrow takes a while, and a local warehouse needs none of it.
    from pubsub.delta.conditional_put import require_conditional_put
    from pubsub.delta.places import StorePath

    root = StorePath(warehouse)
    probe = root / f"_pubsub_{uuid.uuid4()}"
    try:
        probe.write_bytes(b"probe")
        try:
            listed = any(path.name == probe.name for path in root.iterdir())
            if not listed or probe.read_bytes() != b"probe":
                raise PubsubError(f'the warehouse "{warehouse}" does not show what was written to it', sqlstate="58030")
            # HDFS has a rename that does not replace, in any version.
            return require_conditional_put(str(probe)) if is_s3(warehouse) else None
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        text = error.strerror or str(error)
        reasons, settings = (_OF_S3, _SETTINGS_OF_S3) if is_s3(warehouse) else (_OF_HDFS, _SETTINGS_OF_HDFS)
        _, state, hint = next((one for one in reasons if one[0] in text.upper()), ("", "58030", ""))
        raise PubsubError(
            f'cannot write to the warehouse "{warehouse}"',
            sqlstate=state,
            detail=text,
            hint=f"{hint} {settings}".strip(),
        ) from error
