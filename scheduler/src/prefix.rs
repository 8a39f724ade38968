//! Prompt prefixes: block hashes, and the index of which endpoint is believed to hold which.
