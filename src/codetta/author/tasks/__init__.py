"""The tasks of the library, one file each; :mod:`codetta.author.task` loads them by name."""
