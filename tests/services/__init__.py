"""Real servers for tests, on 127.0.0.1 and free ports, ended by process id, with all they write in a given
folder.

s3.py: S3 servers (versitygw, rclone). scripted.py: an HTTP server that gives the answers a test asks for.
The programs come from tests/tools/programs.py.
"""
