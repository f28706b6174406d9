"""The fused backend: programs lowered to QuACK's mainloop on Hopper GPUs.

rules.py, lowering.py, source.py   from a Program to the text of a QuACK epilogue
operations.py                      epilogue operations that QuACK lacks
short_sum.py, short_sum_operations.py   sums in 24 and 20 bits, which are no programs
quack.py                           every import of QuACK and the CuTe DSL
configs.py                         tile configurations, and which one a kernel gets
shipped.py, config_cache.py        measured ones: the package's, the user's
launch.py                          the backend: arrays in, arrays out
"""
