"""Figures 3, 6, 10 and 11 of C.-C. Chen, C.-L. Yang and H.-Y. Cheng, "Efficient and Robust Parallel
DNN Training through Model Parallelism on Multi-GPU Platform" (DualPipe and SpecTrain), simulated.

`partition`: which layers each worker has. `plans`: in which order workers compute. `pipeline`: when
they do. `comparison`: pipelines beside data parallelism. `pictures` draws what they find.
"""
