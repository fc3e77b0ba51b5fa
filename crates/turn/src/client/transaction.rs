//! Pending requests and their retransmission (RFC 8489 section 6.2.1).

use super::{Request, config::Timing};

pub(super) struct Transaction {
    pub(super) id: [u8; 12],
    pub(super) request: Request,
    pub(super) bytes: Vec<u8>,
    /// The request has MESSAGE-INTEGRITY, so the response must have it too.
    pub(super) signed: bool,
    pub(super) challenges: u8,
    pub(super) unverified: Option<(u16, String)>,
    pub(super) transmissions: u32,
    pending: bool,
    interval: u64,
    due: u64,
}

/// Pending requests of a client, at most `LIMIT`.
pub(super) struct Transactions {
    list: Vec<Transaction>,
    timing: Timing,
}

pub(super) struct Start {
    pub(super) id: [u8; 12],
    pub(super) request: Request,
    pub(super) bytes: Vec<u8>,
    pub(super) signed: bool,
    pub(super) challenges: u8,
}

impl Transactions {
    pub(super) const LIMIT: usize = 32;

    pub(super) fn new(timing: Timing) -> Self {
        Self { list: Vec::new(), timing }
    }

    pub(super) fn is_full(&self) -> bool {
        self.list.len() >= Self::LIMIT
    }

    pub(super) fn any(&self, wanted: impl Fn(&Request) -> bool) -> bool {
        self.list.iter().any(|transaction| wanted(&transaction.request))
    }

    pub(super) fn start(&mut self, now: u64, start: Start) {
        let Start { id, request, bytes, signed, challenges } = start;
        let wait = if self.timing.transmissions <= 1 { self.last_wait() } else { self.timing.rto_ms };
        self.list.push(Transaction {
            id,
            request,
            bytes,
            signed,
            challenges,
            unverified: None,
            transmissions: 1,
            pending: true,
            interval: self.timing.rto_ms,
            due: now.saturating_add(wait),
        });
    }

    pub(super) fn find(&mut self, id: &[u8]) -> Option<(usize, &mut Transaction)> {
        self.list.iter_mut().enumerate().find(|(_, transaction)| transaction.id == id)
    }

    pub(super) fn remove(&mut self, index: usize) -> Transaction {
        self.list.remove(index)
    }

    pub(super) fn clear(&mut self) {
        self.list.clear();
    }

    pub(super) fn poll_transmit(&mut self) -> Option<&[u8]> {
        let next = self.list.iter_mut().find(|transaction| transaction.pending)?;
        next.pending = false;
        Some(&next.bytes)
    }

    pub(super) fn next_due(&self) -> Option<u64> {
        self.list.iter().map(|transaction| transaction.due).min()
    }

    /// Returns one request that timed out; call until `None`.
    pub(super) fn expire(&mut self, now: u64) -> Option<Transaction> {
        let last_wait = self.last_wait();
        let Timing { transmissions, .. } = self.timing;
        let mut expired = None;
        for (index, transaction) in self.list.iter_mut().enumerate() {
            if transaction.due > now {
                continue;
            }
            if transaction.transmissions >= transmissions {
                expired = Some(index);
                break;
            }
            transaction.transmissions += 1;
            transaction.pending = true;
            transaction.interval = transaction.interval.saturating_mul(2);
            let wait =
                if transaction.transmissions == transmissions { last_wait } else { transaction.interval };
            transaction.due = now.saturating_add(wait);
        }
        expired.map(|index| self.list.remove(index))
    }

    fn last_wait(&self) -> u64 {
        self.timing.rto_ms.saturating_mul(self.timing.last_wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(id: u8) -> Start {
        Start { id: [id; 12], request: Request::Binding, bytes: vec![id], signed: false, challenges: 0 }
    }

    /// RFC 8489 section 6.2.1: seven transmissions within 31.5 s, each interval twice the last, then a final
    /// wait of 8 s.
    #[test]
    fn transmissions_follow_the_rfc_schedule() {
        let mut transactions = Transactions::new(Timing::default());
        transactions.start(0, start(1));
        let mut sent = Vec::new();
        let mut failed = None;
        let mut now = 0;
        while failed.is_none() {
            failed = transactions.expire(now).map(|_| now);
            while transactions.poll_transmit().is_some() {
                sent.push(now);
            }
            now = transactions.next_due().unwrap_or(now);
        }
        assert_eq!(sent, [0, 500, 1_500, 3_500, 7_500, 15_500, 31_500]);
        assert_eq!(failed, Some(39_500));
    }

    #[test]
    fn a_single_transmission_times_out_after_the_last_wait() {
        let mut transactions = Transactions::new(Timing { rto_ms: 100, transmissions: 1, last_wait: 3 });
        transactions.start(0, start(1));
        assert_eq!(transactions.poll_transmit(), Some(&[1_u8][..]));
        assert_eq!(transactions.next_due(), Some(300));
        assert!(transactions.expire(299).is_none());
        assert!(transactions.expire(300).is_some());
    }
}
