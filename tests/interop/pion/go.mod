module turnpike/interop/pion

go 1.24.0

require (
	github.com/pion/dtls/v3 v3.1.4
	github.com/pion/logging v0.2.4
	github.com/pion/turn/v4 v4.1.4
	github.com/pion/turn/v5 v5.0.13
)

require (
	github.com/pion/randutil v0.1.0 // indirect
	github.com/pion/stun/v3 v3.1.6 // indirect
	github.com/pion/transport/v4 v4.1.0 // indirect
	github.com/wlynxg/anet v0.0.5 // indirect
	golang.org/x/crypto v0.48.0 // indirect
	golang.org/x/sys v0.41.0 // indirect
)
