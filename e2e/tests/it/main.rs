//! The product on a real Envoy.
