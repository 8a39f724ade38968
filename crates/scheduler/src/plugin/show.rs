//! Prints plugins, except in the wasm module.

use std::fmt;

/// Writes a plugin as its `Debug` does. If `Debug` itself were the supertrait of plugins, the
/// vtables of plugins would keep 10 KB of `Debug` code in the wasm module, which prints no plugin.
pub trait PluginDebug {
    /// Writes the plugin. In the wasm module, this function writes nothing.
    ///
    /// # Errors
    /// Returns the errors of the formatter.
    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

impl<T: fmt::Debug> PluginDebug for T {
    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if cfg!(target_arch = "wasm32") {
            Ok(())
        } else {
            self.fmt(f)
        }
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
