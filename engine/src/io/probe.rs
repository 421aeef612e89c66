//! What the kernel, the limits and the file system offer; what is missing and how to fix it.
