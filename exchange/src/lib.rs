//! One HTTP exchange of an inference request, sans-IO: headers and bytes in, actions out.
