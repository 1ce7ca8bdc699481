"""Autocast: a precision for each operator, by the framework's table or an edited one.

| file | decides |
| --- | --- |
| `region.py` | where autocast is on, in which thread, and what is restored when a region is left |
| `edited.py` | regions that change what operators do: another table, emulation, a report |
| `weight_cache.py` | which thread may use PyTorch's cache of cast weights, and when it is emptied |
| `operators.py` | which operators of the dispatcher a name stands for |
| `kernels.py` | what an edited operator does with its inputs |
| `installed.py` | which kernels stand in the dispatcher, and for how long |
| `stepwise.py` | generators and coroutines that are in a region only while they run |
| `custom.py` | custom autograd functions |
| `census.py` | what was cast, where, and what it cost |
| `thread.py` | nothing: it remembers the regions that are open in a thread |
"""
