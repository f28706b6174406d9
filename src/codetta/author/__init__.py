"""The authoring loop: write an epilogue for a task, check it, verify it, time it, keep it.

:mod:`task` says what is asked for, :mod:`candidate` turns an author's file into a Program without
trusting it, :mod:`report` is what every command prints and stores.
"""
