//! The module's allocator: lists of small free blocks, and the standard allocator for the rest.
//!
//! A request makes more than a hundred allocations, nearly all small, and most are freed at its
//! end. The standard allocator of wasm (dlmalloc) searches and merges free blocks, which took an
//! eighth of the module's time. This allocator takes a small block from the list for its size, and
//! returns a freed block to the list for its size.
//!
//! A slab is a page of memory with blocks of one size, and a table has the block size of each slab.
//! So blocks have no headers. The table is used because, if the code passed the size of each freed
//! block instead, the module would be 5 KB larger. Slabs are never freed, because wasm memory
//! cannot be freed.
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

/// The difference between two neighbouring block sizes, and the alignment of all small blocks.
const STEP: usize = 16;
/// The number of block sizes, which are the multiples of [`STEP`] up to 512 bytes.
const SIZES: usize = 32;
/// The size of a slab in bytes.
const SLAB_BYTES: usize = 4096;
/// The number of bytes by which wasm memory grows.
const GROWTH_BYTES: usize = 65_536;
/// The address below which slabs lie. Beyond this address, the standard allocator serves small
/// blocks too. Only the used part of the table of sizes takes memory.
const SLABS_END: usize = 256 << 20;

pub struct SlabAllocator(UnsafeCell<Slabs>);

struct Slabs {
    /// The first free block of each size. A free block begins with the address of the next free
    /// block.
    first: [*mut u8; SIZES],
    /// For each page, the index of its block size plus one; 0 if the page is not a slab.
    sizes: [u8; SLABS_END / SLAB_BYTES],
    /// The address of the next slab, and the end of the memory for slabs. Both are [`SLABS_END`] if
    /// wasm memory cannot grow further.
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

/// Returns the index of the block size for `layout`, or at least [`SIZES`] if the layout is not
/// small. The allocator gets no layout of size 0.
fn size_of_layout(layout: Layout) -> usize {
    if layout.align() <= STEP {
        layout.size().wrapping_sub(1) / STEP
    } else {
        SIZES
    }
}

// SAFETY: a small block is as large as its layout and aligned to `STEP`. A block is in the list of
// free blocks or belongs to the caller, never both. A block outside of all slabs belongs to the
// standard allocator.
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
        // The standard allocator zeroes the block, because this allocator knows which parts of its
        // memory are zero already.
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
    /// Makes a slab for blocks of this size, and returns a block of the slab.
    #[cold]
    #[inline(never)]
    unsafe fn refill(&mut self, size: usize, layout: Layout) -> *mut u8 {
        if self.next == self.end && self.end < SLABS_END {
            // If no memory is left, `grown` is far beyond `SLABS_END`.
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
