"""Simulated GPUs: a script for CUDA and NCCL runs on CPU ranks."""
