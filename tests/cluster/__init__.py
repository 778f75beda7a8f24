"""Several machines: network namespaces with an address, a host name and an sshd each, on a shared disk."""
