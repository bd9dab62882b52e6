"""Bytes on a device and on its host, in closed form."""
