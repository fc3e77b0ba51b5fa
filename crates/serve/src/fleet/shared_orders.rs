//! Certificate orders that the nodes share. They are stored sealed, and a notice announces changes.

use std::{fmt, sync::Arc, time::Duration};

use tokio::sync::watch;
use turnpike_acme::{Later, SecretText, SharedOrders};
use turnpike_fleet::{Notice, QuotaBucket};
use turnpike_stores::StoreError;

use super::node::OwnNode;

pub(super) struct NodeOrders(pub(super) Arc<OwnNode>);

impl fmt::Debug for NodeOrders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeOrders({})", self.0.name)
    }
}

/// Binds a sealed value to its field: it cannot be opened as the value of another field.
fn purpose(field: &str) -> String {
    format!("orders {field}")
}

fn described(error: StoreError) -> String {
    error.to_string()
}

impl SharedOrders for NodeOrders {
    fn server(&self) -> &str {
        self.0.name.as_str()
    }

    fn reserve(&self, duration: Duration) -> Later<'_, Result<bool, String>> {
        let OwnNode { store, incarnation, .. } = &*self.0;
        Box::pin(async move { store.reserve_orders(*incarnation, duration).await.map_err(described) })
    }

    fn release(&self) -> Later<'_, ()> {
        let OwnNode { store, incarnation, .. } = &*self.0;
        Box::pin(async move {
            if let Err(error) = store.release_orders(*incarnation).await {
                tracing::warn!("{error}; no other node will order certificates for some minutes");
            }
        })
    }

    fn read(&self, fields: Vec<String>) -> Later<'_, Result<Vec<Option<SecretText>>, String>> {
        Box::pin(async move {
            let names: Vec<QuotaBucket> = fields.iter().map(|field| self.0.sealer.order(field)).collect();
            let sealed = self.0.store.orders(&names).await.map_err(described)?;
            let open =
                |(field, sealed): (&String, Option<Vec<u8>>)| self.0.sealer.open(&purpose(field), &sealed?);
            Ok(fields.iter().zip(sealed).map(open).collect())
        })
    }

    fn write(&self, fields: Vec<(String, SecretText)>) -> Later<'_, Result<(), String>> {
        Box::pin(async move {
            let seal = |(field, value): (String, SecretText)| {
                (self.0.sealer.order(&field), self.0.seal(&purpose(&field), &value))
            };
            let sealed: Vec<_> = fields.into_iter().map(seal).collect();
            self.0.store.put_orders(&sealed).await.map_err(described)?;
            self.0.say(Notice::OrdersChanged).await.map_err(described)
        })
    }

    fn changes(&self) -> watch::Receiver<()> {
        self.0.orders_changed.subscribe()
    }
}
