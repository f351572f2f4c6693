// SPDX-License-Identifier: Apache-2.0

package balancer

// causes is a set of causes. A cause makes a server unfit for new flows while other servers of its
// service are fit.
type causes uint8

const (
	unresolved   causes = 1 << iota // the server has no next hop
	unreachable                     // its next hop does not answer the kernel
	failing                         // the server fails its health checks
	silent                          // its agent does not answer probes
	incompatible                    // its agent speaks another version of the protocol
	notServed                       // its agent does not have the VIP
	unheard                         // connections that it is offered first are not answered
)

// probed are the causes that probes find. They may be wrong about many servers at a time, by an error in
// the network or in the configuration. So they take no more than a third of the servers out.
const probed = silent | incompatible | notServed | unheard

// anyCause is the set of all causes.
const anyCause = unresolved | unreachable | failing | probed

// has tells whether the set has all of the given causes.
func (c causes) has(these causes) bool { return c&these == these }

// set returns the set with or without the given causes.
func (c causes) set(these causes, hold bool) causes {
	if hold {
		return c | these
	}
	return c &^ these
}

// causeFlags are all causes, the weightiest first, with the flags that note them in a server's slot. The
// next hop in the slot tells whether the server is unresolved.
var causeFlags = []struct {
	cause causes
	flag  balancerServerFlags
}{
	{unresolved, 0},
	{unreachable, balancerServerFlagsSERVER_UNREACHABLE},
	{failing, balancerServerFlagsSERVER_CHECKS_FAIL},
	{silent, balancerServerFlagsSERVER_SILENT},
	{incompatible, balancerServerFlagsSERVER_INCOMPATIBLE},
	{notServed, balancerServerFlagsSERVER_NOT_SERVED},
	{unheard, balancerServerFlagsSERVER_UNHEARD},
}

// each lists the causes in the set, the weightiest first.
func (c causes) each() []causes {
	var all []causes
	for _, kind := range causeFlags {
		if c.has(kind.cause) {
			all = append(all, kind.cause)
		}
	}
	return all
}

// flags note the causes in a server's slot.
func (c causes) flags() (flags balancerServerFlags) {
	for _, kind := range causeFlags {
		if c.has(kind.cause) {
			flags |= kind.flag
		}
	}
	return flags
}

// causes reads the causes that a server's slot tells; none of a slot that is not in use.
func (t *serverTable) causes(slot uint32) (all causes) {
	flags := t.flags(slot)
	if flags&balancerServerFlagsSERVER_IN_USE == 0 {
		return 0
	}
	for _, kind := range causeFlags {
		if kind.flag != 0 && flags&kind.flag != 0 {
			all |= kind.cause
		}
	}
	if all == 0 && flags&balancerServerFlagsSERVER_FAILING != 0 {
		all = failing // an earlier build knows no other cause, and does not note it
	}
	return all.set(unresolved, !t.hasNextHop(slot))
}
