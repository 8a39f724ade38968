//! Who is there: registry and discovery of model servers.
