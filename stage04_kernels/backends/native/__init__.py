"""The native CPU path: one C++ file, native.cpp, and what makes backends of its functions. Without a compiler torch's path runs."""
