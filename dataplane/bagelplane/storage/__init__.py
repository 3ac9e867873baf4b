"""Object storage and local folders behind one small class.

Job: list, read (whole or by ranges), write and delete objects under `s3://`, `gs://`, `az://`, `file://` and
plain paths, and turn whatever goes wrong into a StorageError that names the object, the endpoint and what to
do.

What must not happen here: no exception of botocore, aiohttp or s3fs leaves this package; nothing is opened,
and no thread started, at import; no credential is logged or put into a message; no listing is cached; no
torch.

Owners: a `Storage` belongs to the process that uses it and may be used by all of its threads. Connections
are made at the first use in each process, on fsspec's event-loop thread, and made anew after a fork, so that
nothing waits for a thread that the fork left behind. A `Storage` can be pickled: it travels as its settings.
"""

from bagelplane.storage.backends import FileInfo
from bagelplane.storage.faults import ObjectMissingError, ObjectTooLargeError, UnusableNameError
from bagelplane.storage.settings import StorageSettings
from bagelplane.storage.store import Storage, open_storage
from bagelplane.storage.uris import join_uri, same_object

__all__ = [
    "FileInfo",
    "ObjectMissingError",
    "ObjectTooLargeError",
    "Storage",
    "StorageSettings",
    "UnusableNameError",
    "join_uri",
    "open_storage",
    "same_object",
]
