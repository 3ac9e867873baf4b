"""What must hold for a long time or very often: programs, and their short versions as tests. `make soak` runs them.

kills.py     SIGKILL at random moments to producers, supervisors and trainers; no byte differs, nothing is left
memory.py    many small packs through a real sidecar; memory, descriptors and threads stay what they were
fuzz.py      what is damaged or made up, to the ring's reader, the record's reader and the protocol's decoder
"""
