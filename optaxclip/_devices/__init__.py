"""Platforms, and meshes of devices.

platforms   the switch between CPU, GPU and TPU
mesh        which mesh axes split a leaf, and collectives
mesh_types  what the types of arrays say of devices
"""
