package config

// checkAgent reports every rule that a decoded agent breaks.
func (d *document) checkAgent(a *Agent) {
	d.checkHost(a.Node.Instance, a.Node.Interface, a.Node.Locator, a.Node.Addresses)
	if d.has("node.mtu") {
		checkRange(d, "node.mtu", a.Node.MTU, 1280, 65535)
	}
	d.checkListen(a.Metrics.Listen)
	d.checkServices(a.Services)
	d.checkLocatorNeeded(a.Services, a.Node.Locator)
	for i, s := range a.Services {
		if s.Encapsulation.isTunnel() && len(a.Node.Addresses) == 0 {
			d.failf("node.addresses", "required by %s, whose encapsulation is %s", item("services", i), s.Encapsulation)
			break
		}
	}
	vips := newVIPs(a.Services)
	for i, address := range a.Node.Addresses {
		vips.checkNot(d, item("node.addresses", i), address)
	}
	for i, s := range a.Services {
		if a.Node.Locator.Contains(s.VIP) {
			d.failf(child(item("services", i), "vip"), "is in the locator of the agent")
		}
	}
}
