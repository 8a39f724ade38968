//! Resumes and refuses requests in a callback of a root context.

use std::cell::RefCell;
use std::rc::Rc;

use exchange::Timestamp;

use crate::host::Host;
use crate::vm::VmState;
use crate::vm::parked_request::ParkedRequest;

/// Whether this callback may send another local reply. If not, the VM wakes itself, and continues
/// in the callback of the wake-up.
fn may_reply<H: Host>(vm: &RefCell<VmState<H>>) -> bool {
    let mut vm = vm.borrow_mut();
    let may_reply = vm.watched().may_reply();
    if !may_reply {
        vm.wake_self();
    }
    may_reply
}

/// Decides each parked request in `due` again. The requests for which this callback may send no
/// reply stay parked.
pub(crate) fn retry<H: Host>(vm: &RefCell<VmState<H>>, due: Vec<Rc<dyn ParkedRequest>>) {
    for request in due {
        if !may_reply(vm) {
            break;
        }
        request.retry();
    }
}

/// The maximum number of held requests that are tried in one callback. After this number, the VM
/// wakes itself, and continues in the callback of the wake-up.
const RELEASES_MAX: usize = 256;

/// Resumes the held requests that may find room now.
pub(crate) fn release_queued<H: Host>(vm: &RefCell<VmState<H>>) {
    if !vm.borrow_mut().begin_release() {
        return;
    }
    let mut resumed = false;
    for _ in 0..RELEASES_MAX {
        if !vm.borrow_mut().watched().may_reply() {
            break;
        }
        let next = vm.borrow_mut().next_queued();
        let Some(request) = next else { break };
        request.retry();
        resumed = true;
    }
    vm.borrow_mut().end_release(resumed);
}

/// Refuses the bodies for which there is no room, and checks the sent requests that may make no
/// progress.
pub(crate) fn check_streams<H: Host>(vm: &RefCell<VmState<H>>, now: Timestamp) {
    while may_reply(vm) {
        let refused = vm.borrow_mut().watched().bodies.next_refused();
        let Some(refused) = refused else { break };
        if let Some(stream) = refused.upgrade() {
            stream.refuse_body();
        }
    }
    while may_reply(vm) {
        let request = vm.borrow_mut().watched().next_reply(now);
        let Some(request) = request else { break };
        request.check_reply(now);
    }
}
