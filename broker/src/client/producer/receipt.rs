//! What became of a batch, for everyone who waits for it; and the memory it takes until then.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use ringfence_engine::types::Offset;
use tokio::sync::Notify;

use crate::client::ClientError;

/// Bytes that all batches of a producer may take.
#[derive(Debug)]
pub(super) struct Budget {
    limit: usize,
    used: Cell<usize>,
    unsettled: Cell<usize>,
    totals: RefCell<Totals>,
    changed: Notify,
}

/// What a producer has done so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Totals {
    /// Records handed in.
    pub records: u64,
    /// Records acknowledged (with acks 0: sent).
    pub acknowledged: u64,
    /// Records that failed.
    pub failed: u64,
    /// Why the first of them failed.
    pub first_error: Option<ClientError>,
}

impl Budget {
    pub(super) fn new(limit: usize) -> Budget {
        Budget {
            limit,
            used: Cell::new(0),
            unsettled: Cell::new(0),
            totals: RefCell::default(),
            changed: Notify::new(),
        }
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals.borrow().clone()
    }

    /// Waits until less than the limit is used.
    pub(super) async fn room(&self) {
        self.wait_until(|budget| budget.used.get() < budget.limit).await;
    }

    /// Waits until every batch is settled.
    pub(super) async fn all_settled(&self) {
        self.wait_until(|budget| budget.unsettled.get() == 0).await;
    }

    async fn wait_until(&self, enough: impl Fn(&Budget) -> bool) {
        loop {
            let changed = self.changed.notified();
            if enough(self) {
                return;
            }
            changed.await;
        }
    }
}

/// The fate of one batch.
#[derive(Debug)]
pub(super) struct Receipt {
    budget: Rc<Budget>,
    bytes: Cell<usize>,
    records: Cell<u32>,
    result: RefCell<Option<Result<Option<Offset>, ClientError>>>,
    settled_at: Cell<Option<Instant>>,
    settled: Notify,
}

impl Receipt {
    pub(super) fn new(budget: &Rc<Budget>) -> Rc<Receipt> {
        budget.unsettled.set(budget.unsettled.get() + 1);
        Rc::new(Receipt {
            budget: Rc::clone(budget),
            bytes: Cell::new(0),
            records: Cell::new(0),
            result: RefCell::default(),
            settled_at: Cell::default(),
            settled: Notify::new(),
        })
    }

    /// The batch takes `records` and `bytes` more.
    pub(super) fn grow(&self, records: u32, bytes: usize) {
        self.records.set(self.records.get() + records);
        self.budget.totals.borrow_mut().records += u64::from(records);
        self.bytes.set(self.bytes.get() + bytes);
        self.budget.used.set(self.budget.used.get() + bytes);
    }

    /// The fate is known; only the first one counts.
    pub(super) fn settle(&self, result: Result<Option<Offset>, ClientError>) {
        if self.result.borrow().is_some() {
            return;
        }
        self.count(&result);
        *self.result.borrow_mut() = Some(result);
        self.settled_at.set(Some(Instant::now()));
        let budget = &self.budget;
        budget.used.set(budget.used.get() - self.bytes.get());
        budget.unsettled.set(budget.unsettled.get() - 1);
        budget.changed.notify_waiters();
        self.settled.notify_waiters();
    }

    fn count(&self, result: &Result<Option<Offset>, ClientError>) {
        let records = u64::from(self.records.get());
        let mut totals = self.budget.totals.borrow_mut();
        match result {
            Ok(_) => totals.acknowledged += records,
            Err(error) => {
                totals.failed += records;
                totals.first_error.get_or_insert_with(|| error.clone());
            }
        }
    }

    /// Waits for the fate: the base offset, and when it was known.
    pub(super) async fn wait(&self) -> (Result<Option<Offset>, ClientError>, Instant) {
        loop {
            let settled = self.settled.notified();
            if let (Some(result), Some(at)) = (self.result.borrow().clone(), self.settled_at.get()) {
                return (result, at);
            }
            settled.await;
        }
    }
}
