//! Tests of the exchange as its hosts see it.

mod release;
mod script;
