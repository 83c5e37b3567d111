"""Wire benchmark (`thinwire bench wire`): training methods compared on real sockets over slow links."""
