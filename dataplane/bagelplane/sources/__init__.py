"""Read rows of each group type and hand them to the engine.

One module a group type: which units a data set has (files, row groups, lines), and how a unit's rows are read.
Everything about packing is the engine's; everything about access is `bagelplane.storage`'s. A source belongs to
one logical worker of one rank and is used by one thread; encoded image bytes may be read by decode threads.
No torch here: the sidecar has none.
"""

from bagelplane.sources.registry import register_group_type, registered_types

__all__ = ["register_group_type", "registered_types"]
