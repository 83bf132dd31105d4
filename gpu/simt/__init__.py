"""A simulator of CUDA: the kernels of `gpu/kernels`, unmodified, compiled by the host's g++ and run on the CPU.

simt.h gives a .cu file CUDA's names, simt.cpp runs its threads, check.cpp holds every access against CUDA's rules; build.py
compiles them once and keeps the result; machine.py loads and launches. `gpu.module` is the way in.
"""
