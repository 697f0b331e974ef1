"""Experiments: a command for each of the paper's figures, and `overhead`; the folders serve them.

`cluster`: hosts as network namespaces, with links of a stated rate. `models`: what is trained.
`emulation`: what a measured worker runs. `campaign`: runs on the cluster, and their records.
`drawing`: what figures make of runs. Simulations and the bound are `p3kv.report.forecast`'s.
"""
