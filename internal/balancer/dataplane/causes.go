// SPDX-License-Identifier: Apache-2.0

package dataplane

// Causes is a set of causes. A cause makes a server unfit for new flows while other servers of its
// service are fit.
type Causes uint8

const (
	Unresolved   Causes = 1 << iota // the server has no next hop
	Unreachable                     // its next hop does not answer the kernel
	Failing                         // the server fails its health checks
	Silent                          // its agent does not answer probes
	Incompatible                    // its agent speaks another version of the protocol
	NotServed                       // its agent does not have the VIP
	Unheard                         // connections that it is offered first are not answered
)

// Probed are the causes that probes find. Probes can be wrong about many servers at a time, by
// an error in the network or in the configuration, and so take out at most a third of a
// service's servers.
const Probed = Silent | Incompatible | NotServed | Unheard

// AnyCause is the set of all causes.
const AnyCause = Unresolved | Unreachable | Failing | Probed

// Has tells whether the set has all of the given causes.
func (c Causes) Has(these Causes) bool { return c&these == these }

// Set returns the set with or without the given causes.
func (c Causes) Set(these Causes, hold bool) Causes {
	if hold {
		return c | these
	}
	return c &^ these
}

// causeFlags are all causes, the weightiest first, with the flags that note them in a server's
// slot. The next hop in the slot tells whether the server is unresolved.
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
	{Unheard, FlagUnheard},
}

// Each lists the causes of the set one by one, the weightiest first.
func (c Causes) Each() []Causes {
	var all []Causes
	for _, kind := range causeFlags {
		if c.Has(kind.cause) {
			all = append(all, kind.cause)
		}
	}
	return all
}

// Flags returns the flags that note the causes in a server's slot. Unresolved has none.
func (c Causes) Flags() (flags ServerFlags) {
	for _, kind := range causeFlags {
		if c.Has(kind.cause) {
			flags |= kind.flag
		}
	}
	return flags
}

// Causes returns the causes that a slot notes. A slot that is not in use has none.
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
