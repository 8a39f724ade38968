//! How plugins are printed, where anybody prints them.

use std::fmt;

/// What writes a plugin's `Debug`. Were that the supertrait, the table of functions of each plugin would keep the code of it in the module
/// inside the proxy, 10 KB for all of them, where nobody prints one.
pub trait PluginDebug {
    /// Writes it; in that module, nothing.
    ///
    /// # Errors
    /// Those of the formatter.
    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

impl<T: fmt::Debug> PluginDebug for T {
    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if cfg!(target_arch = "wasm32") { Ok(()) } else { self.fmt(f) }
    }
}

macro_rules! debug_by_show {
    ($($plugin:ident),*) => {$(
        impl std::fmt::Debug for dyn $plugin {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.show(f)
            }
        }
    )*};
}

pub(crate) use debug_by_show;
