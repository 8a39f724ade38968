//! The module's allocator: lists of small free blocks, and the standard allocator for the rest.
//!
//! A request makes more than a hundred allocations, nearly all small, and most are freed at its
//! end. The standard allocator of wasm (dlmalloc) searches and merges free blocks, which took an
//! eighth of the module's time. Here a small block comes from the list of its size, and returns to
//! it.
//!
//! A slab is a page of memory with blocks of one size, and a table names that size by the page. So
//! blocks have no headers, and a caller that frees a block need not give its size, which would make
//! the module 5 KB larger. Slabs are never given back, because wasm memory is never given back
//! either.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "sizes of slabs, and addresses below `SLABS_END`"
)]
#![expect(
    unsafe_code,
    reason = "an allocator hands out raw memory; all of it is in this file"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::arch::wasm32::memory_grow;
use std::cell::UnsafeCell;
use std::ptr::{null_mut, with_exposed_provenance_mut};

/// The difference of two sizes, and the alignment of all small blocks.
const STEP: usize = 16;
/// The sizes of small blocks: up to 512 bytes.
const SIZES: usize = 32;
/// Bytes of a slab.
const SLAB_BYTES: usize = 4096;
/// Bytes by which wasm memory grows.
const GROWTH_BYTES: usize = 65_536;
/// Slabs lie below this address. Beyond it, the standard allocator serves small blocks too. Only
/// the part of the table that is used takes memory.
const SLABS_END: usize = 256 << 20;

pub struct SlabAllocator(UnsafeCell<Slabs>);

struct Slabs {
    /// The first free block of each size. A free block begins with the address of the next.
    first: [*mut u8; SIZES],
    /// For each page, its size plus one; 0 if the page is not a slab.
    sizes: [u8; SLABS_END / SLAB_BYTES],
    /// The next slab, and the end of the memory for slabs. [`SLABS_END`] if there is no more
    /// memory.
    next: usize,
    end: usize,
}

// SAFETY: a wasm VM has one thread.
unsafe impl Sync for SlabAllocator {}

// === impl SlabAllocator ===

impl SlabAllocator {
    pub const fn new() -> Self {
        Self(UnsafeCell::new(Slabs {
            first: [null_mut(); SIZES],
            sizes: [0; SLABS_END / SLAB_BYTES],
            next: 0,
            end: 0,
        }))
    }
}

/// The number of a layout's size. At least [`SIZES`] if the layout is not small. No layout here has
/// size 0.
fn size_of_layout(layout: Layout) -> usize {
    if layout.align() <= STEP {
        layout.size().wrapping_sub(1) / STEP
    } else {
        SIZES
    }
}

// SAFETY: a small block is as large as its layout and aligned to `STEP`. A block is in the list or
// with the caller, never both. A block outside of all slabs is the standard allocator's.
unsafe impl GlobalAlloc for SlabAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let slabs = unsafe { &mut *self.0.get() };
        let size = size_of_layout(layout);
        match slabs.first.get_mut(size) {
            Some(first) if !first.is_null() => {
                let block = *first;
                *first = unsafe { block.cast::<*mut u8>().read() };
                block
            }
            Some(_) => unsafe { slabs.refill(size, layout) },
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let slabs = unsafe { &mut *self.0.get() };
        let size = slabs
            .sizes
            .get(block.addr() / SLAB_BYTES)
            .copied()
            .unwrap_or(0);
        match slabs.first.get_mut(usize::from(size).wrapping_sub(1)) {
            Some(first) => {
                unsafe { block.cast::<*mut u8>().write(*first) };
                *first = block;
            }
            None => unsafe { System.dealloc(block, layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // The standard allocator knows which of its memory is zero.
        if size_of_layout(layout) >= SIZES {
            return unsafe { System.alloc_zeroed(layout) };
        }
        let block = unsafe { self.alloc(layout) };
        if !block.is_null() {
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        let slabs = unsafe { &mut *self.0.get() };
        let new = unsafe { Layout::from_size_align_unchecked(bytes, layout.align()) };
        let size = slabs
            .sizes
            .get(block.addr() / SLAB_BYTES)
            .copied()
            .unwrap_or(0);
        match (usize::from(size).checked_sub(1), size_of_layout(new)) {
            (Some(old), new) if old == new => return block,
            (None, SIZES..) => return unsafe { System.realloc(block, layout, bytes) },
            _ => {}
        }
        let moved = unsafe { self.alloc(new) };
        if !moved.is_null() {
            unsafe {
                moved.copy_from_nonoverlapping(block, layout.size().min(bytes));
                self.dealloc(block, layout);
            }
        }
        moved
    }
}

// === impl Slabs ===

impl Slabs {
    /// Makes a slab of this size and takes a block of it.
    #[cold]
    #[inline(never)]
    unsafe fn refill(&mut self, size: usize, layout: Layout) -> *mut u8 {
        if self.next == self.end && self.end < SLABS_END {
            // Without memory left, the product is far beyond `SLABS_END`.
            let grown = memory_grow::<0>(1).wrapping_mul(GROWTH_BYTES);
            (self.next, self.end) = if grown < SLABS_END {
                (grown, grown + GROWTH_BYTES)
            } else {
                (SLABS_END, SLABS_END)
            };
        }
        if self.next >= SLABS_END {
            return unsafe { System.alloc(layout) };
        }
        let slab = self.next;
        let bytes = (size + 1) * STEP;
        self.next += SLAB_BYTES;
        if let (Some(known), Some(first)) = (
            self.sizes.get_mut(slab / SLAB_BYTES),
            self.first.get_mut(size),
        ) {
            *known = size as u8 + 1;
            for at in (1..SLAB_BYTES / bytes).rev() {
                let block = with_exposed_provenance_mut::<u8>(slab + at * bytes);
                unsafe { block.cast::<*mut u8>().write(*first) };
                *first = block;
            }
        }
        with_exposed_provenance_mut(slab)
    }
}
