window.google={};
