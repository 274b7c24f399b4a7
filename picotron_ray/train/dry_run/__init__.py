"""One rank of any layout stepped with fake tensors: peak bytes and bytes sent, without its devices."""
