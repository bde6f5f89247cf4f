"""`moax bench`: each product, quantization, permutation and block beside its physical limit and its peers.

One row a measurement (`report.Row`): time, rate, the fraction of the limit measured in the same run, the ratio to each
peer, and the error against float64. What cannot run here is a row too, with the reason.
"""
