//! Endpoint picking as a pure function: snapshot and request in, decision out.
