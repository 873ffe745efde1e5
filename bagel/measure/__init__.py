"""Cases, peers and tables: what is measured and how."""
