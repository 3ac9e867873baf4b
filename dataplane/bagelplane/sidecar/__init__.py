"""The sidecar: reads, packs and decodes for the ranks of one pod, keeps their states, resumes them.

Job: own the run directory (socket and rings), one producer process for each local rank, and the snapshots.

Who owns what: the *supervisor* is one process with one asyncio loop. It owns the Unix socket, all bookkeeping
of acknowledged steps and all snapshots; it never decodes, and blocking calls (storage) run in its threads.
A *producer* is one process (a fresh interpreter, never a fork) for one local rank: its main thread plans,
decodes and is the only writer of its ring; its control thread hears acknowledgements, and when the
supervisor ends.

What must not happen here: importing torch; pickle in anything that leaves a process; a wait without a
deadline; a snapshot of a step that no trainer has acknowledged.
"""
