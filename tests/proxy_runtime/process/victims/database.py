"""Has a database open, in the directory that is its argument, until it gets SIGUSR1."""

import signal
import sqlite3
import sys

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
connection = sqlite3.connect(f"{sys.argv[1]}/a.db")
with connection:
    connection.execute("create table t(i integer)")
print("open", flush=True)
signal.sigwait([signal.SIGUSR1])
connection.close()
signal.pause()
