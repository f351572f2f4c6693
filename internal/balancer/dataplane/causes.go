// SPDX-License-Identifier: Apache-2.0

package dataplane

// Causes is a set of causes. A server that has a cause gets no new flows, as long as other servers
// of its service have no cause.
type Causes uint8

const (
	Unresolved   Causes = 1 << iota // the server has no next hop
	Unreachable                     // the server's next hop does not answer the kernel
	Failing                         // the server fails its health checks
	Silent                          // the server's agent does not answer probes
	Incompatible                    // the server's agent uses another version of the protocol
	NotServed                       // the server's agent does not have the VIP
	Unheard                         // offers that the server gets first are not answered
	Refusing                        // the server's application has stopped listening
)

// Probed are the causes that probes find. An error in the network or in the configuration can make
// probes wrong about many servers at once. So probes exclude at most a third of a service's
// servers.
const Probed = Silent | Incompatible | NotServed | Refusing | Unheard

// AnyCause is the set of all causes.
const AnyCause = Unresolved | Unreachable | Failing | Probed

// Has tells whether the set contains all of the given causes.
func (c Causes) Has(these Causes) bool { return c&these == these }

// Set returns the set with the given causes if they hold, and without them otherwise.
func (c Causes) Set(these Causes, hold bool) Causes {
	if hold {
		return c | these
	}
	return c &^ these
}

// causeFlags lists all causes, the most severe first, with the flags that represent them in a
// server's slot. Unresolved has no flag: it follows from the next hop in the slot.
var causeFlags = []struct {
	cause Causes
	flag  ServerFlags
}{
	{Unresolved, 0},
	{Unreachable, FlagUnreachable},
	{Failing, FlagChecksFail},
	{Silent, FlagSilent},
	{Incompatible, FlagIncompatible},
	{NotServed, FlagNotServed},
	{Refusing, FlagRefusing},
	{Unheard, FlagUnheard},
}

// Each lists the causes of the set one by one, the most severe first.
func (c Causes) Each() []Causes {
	var all []Causes
	for _, kind := range causeFlags {
		if c.Has(kind.cause) {
			all = append(all, kind.cause)
		}
	}
	return all
}

// Flags returns the flags that represent the causes in a server's slot. Unresolved has no flag.
func (c Causes) Flags() (flags ServerFlags) {
	for _, kind := range causeFlags {
		if c.Has(kind.cause) {
			flags |= kind.flag
		}
	}
	return flags
}

// Causes returns the causes of the slot's server. A slot that is not in use has none.
func (t *ServerTable) Causes(slot uint32) (all Causes) {
	flags := t.Flags(slot)
	if flags&FlagInUse == 0 {
		return 0
	}
	for _, kind := range causeFlags {
		if kind.flag != 0 && flags&kind.flag != 0 {
			all |= kind.cause
		}
	}
	return all.Set(Unresolved, !t.HasNextHop(slot))
}
