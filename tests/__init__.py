"""The test suite.

A comment such as ``F-fork-cow`` names a fault that libraries of this kind had, which the test beside it excludes.
Letters are groups: A addresses, tails and shapes; B splits, partial results and log-sum-exp; C masks and score
modifiers; D write, gather, copy and swap; E graphs, streams and devices; F the cache class; G PyTorch; H build and
import.
"""
